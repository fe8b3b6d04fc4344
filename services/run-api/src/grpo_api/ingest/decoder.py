"""Decodes submissions: at once, or in a process of its own where that would take long."""

from __future__ import annotations

from grpo_api.http.inflate import TooMuchWork
from grpo_api.ingest.decode import Decode, Decoded, RawBody
from grpo_api.ingest.decode_worker import DecodeWorker


class SubmissionDecoder:
    """Attributes:
    max_bytes: largest body, as sent and after decompression.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._worker = DecodeWorker(max_bytes)

    def close(self) -> None:
        self._worker.close()

    async def decode(self, decode: Decode, body: RawBody) -> Decoded:
        """
        Raises:
            Refused: 400 for broken gzip, 413 above `max_bytes`, 422 for what breaks the record.
            StoreUnavailable: others before it took too long.
        """
        try:
            return decode(body, None)
        except TooMuchWork:
            return await self._worker.run(decode, body)
