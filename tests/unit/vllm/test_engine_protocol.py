"""The plan that the supervisor sends to the fork server."""

from __future__ import annotations

import os
import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_vllm import engine_protocol
from grpo_vllm.engine_protocol import EnginePlan


@settings(max_examples=10)  # hundreds of real descriptors in each plan
@given(parked=st.integers(0, 2 * engine_protocol._DESCRIPTORS_PER_PACKET + 1))
def test_a_plan_arrives_with_the_receivers_own_descriptors_of_the_same_files(parked: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    files = [os.memfd_create(str(i)) for i in range(4 + parked)]
    plan = EnginePlan(
        channel=files[0], public=files[1], private=files[2], control=files[3], parked=files[4:]
    )
    with ours, theirs:
        engine_protocol.send_plan(ours, plan)
        received = engine_protocol.receive_plan(theirs)
        assert received is not None
        ours.close()
        assert engine_protocol.receive_plan(theirs) is None
    assert not set(received.descriptors()) & set(files)
    for sent, got in zip(plan.descriptors(), received.descriptors(), strict=True):
        assert os.path.samestat(os.fstat(sent), os.fstat(got))
    assert received.weights == plan.weights
    for descriptor in (*files, *received.descriptors()):
        os.close(descriptor)
