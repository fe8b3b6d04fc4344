#!/bin/bash
# Runs a command on a Kubernetes cluster of one node: `with_cluster.sh COMMAND...`, as root on Debian.
#
# The first use builds the cluster's programs (build_cluster.sh, about 8 minutes); later uses start in
# seconds. Pods run on the Docker engine of with_engine.sh, from the images of that engine. The command finds
# kubectl, KUBECONFIG and DOCKER_HOST. The cluster has Services, DNS names for them and a default
# storage class for all access modes. It ends with the command; its logs stay until the next use.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=${XDG_CACHE_HOME:-$HOME/.cache}/grpo/kubernetes
run=$home/run
pause_image=grpo/pause:test
pids=()
command=

install_tools() { # socat for the kubelet's port forwarding
  if ! command -v socat >/dev/null || ! command -v dpkg-source >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends socat dpkg-dev >/dev/null
  fi
}

if [ "${1-}" != --on-engine ]; then
  mkdir -p "$home"
  exec 9>"$home/lock"
  # Two kubelets on one engine would end each other's pods.
  flock --wait 1800 9 || { echo "another cluster still runs; its lock is $home/lock" >&2; exit 1; }
  install_tools
  [ -d "$home/bin" ] || bash "$here/build_cluster.sh" "$home"
  exec bash "$here/../containers/with_engine.sh" setpriv --pdeathsig TERM bash "${BASH_SOURCE[0]}" --on-engine "$@"
fi
shift

start() { # start NAME COMMAND...: ends with this script, even if this is killed
  local name=$1
  shift
  setpriv --pdeathsig KILL "$@" >"$run/log/$name.log" 2>&1 &
  pids+=($!)
}

all_alive() {
  local pid
  for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null || return 1; done
}

within() { # within SECONDS COMMAND...: repeats a command until it succeeds
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge $end ] || ! all_alive; then
      tail -n 5 "$run"/log/*.log >&2
      echo "the cluster did not start: '$*' still fails; its logs are in $run/log" >&2
      exit 1
    fi
    sleep 0.2
  done
}

free_ports() {
  python3 -c 'import socket, sys
held = [socket.create_server(("", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in held))' "$1"
}

certificate() { # certificate NAME SUBJECT ALTERNATIVE_NAMES
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$1.key" -subj "$2" -out "$1.csr"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out "$1.crt" \
    -extfile <(echo "subjectAltName=$3")
}

write_credentials() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test-cluster \
    -keyout ca.key -out ca.crt
  certificate api /CN=kube-apiserver "IP:$address,IP:10.96.0.1,DNS:kubernetes.default.svc"
  certificate admin /O=system:masters/CN=admin DNS:admin
  cat >kubeconfig <<END
apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "$server", certificate-authority: $run/ca.crt}}]
users: [{name: admin, user: {client-certificate: $run/admin.crt, client-key: $run/admin.key}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
END
}

start_control_plane() {
  local etcd=http://127.0.0.1:$etcd_port peer=http://127.0.0.1:$peer_port
  start etcd etcd --data-dir etcd --listen-client-urls "$etcd" --advertise-client-urls "$etcd" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "default=$peer"
  start kube-apiserver kube-apiserver --etcd-servers "$etcd" --authorization-mode RBAC --allow-privileged \
    --bind-address "$address" --advertise-address "$address" --secure-port "$api_port" --insecure-port 0 \
    --tls-cert-file api.crt --tls-private-key-file api.key --client-ca-file ca.crt \
    --kubelet-client-certificate admin.crt --kubelet-client-key admin.key \
    --kubelet-preferred-address-types InternalIP --service-cluster-ip-range 10.96.0.0/16 \
    --service-account-issuer https://kubernetes.default.svc \
    --service-account-signing-key-file api.key --service-account-key-file api.crt
  within 60 kubectl get --raw /readyz
  # Without a umask, containers of any user may write to new volumes.
  start kube-controller-manager bash -c 'umask 0; exec "$@"' -- kube-controller-manager \
    --kubeconfig kubeconfig --leader-elect=false --port 0 --secure-port 0 \
    --service-account-private-key-file api.key --root-ca-file ca.crt --enable-hostpath-provisioner
  start kube-scheduler kube-scheduler --kubeconfig kubeconfig --leader-elect=false --port 0 --secure-port 0
}

# The kubelet and kube-proxy change settings of the kernel, and the kubelet writes into /var/log. In a mount namespace
# they find the settings as they want them, and a /var/log that ends with them. The engine sees the kubelet's volumes.
settings=(vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000 net/ipv4/conf/all/route_localnet=1)
isolated=(unshare --mount --propagation unchanged bash -euc '
  for path in / /proc /var/log; do mount --make-private "$(findmnt --noheadings --output TARGET --target $path)"; done
  mount -t tmpfs tmpfs /var/log
  for file in $(cd settings && find . -type f); do mount --bind "settings/$file" "/proc/sys/$file"; done
  exec "$@"' --)

start_node() {
  mkdir -p settings/{vm,kernel/keys,net/ipv4/conf/all} kubelet
  local setting
  for setting in "${settings[@]}"; do echo "${setting#*=}" >"settings/${setting%=*}"; done
  : >resolv.conf
  mount --bind kubelet kubelet
  mount --make-shared kubelet
  cat >kubelet.yaml <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: $run/ca.crt}}
authorization: {mode: AlwaysAllow}
address: $address
port: $kubelet_port
healthzPort: 0
readOnlyPort: 0
oomScoreAdj: 0
cgroupDriver: $(docker info --format '{{.CgroupDriver}}')
cgroupsPerQOS: false
enforceNodeAllocatable: []
nodeStatusUpdateFrequency: 1s
evictionHard: {memory.available: 1Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}
imageGCHighThresholdPercent: 100
failSwapOn: false
makeIPTablesUtilChains: false
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
resolvConf: $run/resolv.conf
featureGates: {SizeMemoryBackedVolumes: true, DevicePlugins: false, KubeletPodResources: false}
volumePluginDir: $run/plugins
END
  start kubelet "${isolated[@]}" kubelet --kubeconfig kubeconfig --config kubelet.yaml \
    --root-dir "$run/kubelet" --cert-dir "$run/kubelet/pki" \
    --hostname-override node --node-ip "$address" --container-runtime docker --docker-endpoint "$DOCKER_HOST" \
    --network-plugin= --pod-infra-container-image $pause_image \
    --experimental-dockershim-root-directory "$run/dockershim" --container-runtime-endpoint "unix://$run/dockershim.sock"
  start kube-proxy "${isolated[@]}" kube-proxy --kubeconfig kubeconfig --proxy-mode iptables --masquerade-all \
    --hostname-override node --bind-address "$address" --healthz-port 0 --metrics-bind-address "127.0.0.1:$metrics_port" --oom-score-adj 0 \
    --conntrack-max-per-core 0 --conntrack-tcp-timeout-established 0 --conntrack-tcp-timeout-close-wait 0
  start cluster_dns python3 "$here/cluster_dns.py" "$address" "$dns_port" "$server" "$run"
}

add_services() {
  kubectl apply --filename - <<END
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: standard, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}
provisioner: kubernetes.io/host-path
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec: {clusterIP: 10.96.0.10, ports: [{port: 53, protocol: UDP}]}
---
apiVersion: v1
kind: Endpoints
metadata: {name: kube-dns, namespace: kube-system}
subsets: [{addresses: [{ip: $address}], ports: [{port: $dns_port, protocol: UDP}]}]
END
}

remove_pods() {
  docker ps --all --quiet --filter label=io.kubernetes.docker.type | xargs --no-run-if-empty docker rm --force --volumes
  findmnt --raw --noheadings --output TARGET | awk -v below="$run/" 'index($0, below) == 1' | sort --reverse |
    xargs --no-run-if-empty umount
}

stop() {
  trap - EXIT
  trap '' INT TERM
  {
    kill "$command" || true
    kill -KILL "${pids[@]}" || true # the cluster's state is removed in any case
    wait || true
    for _ in 1 2 3; do # the engine may still start a container that the kubelet asked for
      remove_pods || true
      sleep 1
    done
    iptables-save --counters | grep --invert-match KUBE- | iptables-restore --counters || true
  } >"$run/log/stop.log" 2>&1
  find "$run" -mindepth 1 -maxdepth 1 ! -name log -exec rm -rf --one-file-system {} +
}

export DOCKER_HOST=${DOCKER_HOST:-$(docker context inspect --format '{{.Endpoints.docker.Host}}')}
export KUBECONFIG=$run/kubeconfig PATH=$home/bin:$PATH
remove_pods >/dev/null # of a cluster that was killed
rm -rf --one-file-system "$run"
mkdir -p "$run/log"
trap stop EXIT
trap 'exit 143' INT TERM

# Docker 28 does not show the gateway of a bridge that it has just made.
bridge=$(docker network inspect bridge --format '{{index .Options "com.docker.network.bridge.name"}}')
address=$(ip -4 -oneline address show "$bridge" | awk '{sub("/.*", "", $4); print $4}')
read -r etcd_port peer_port api_port kubelet_port dns_port metrics_port <<<"$(free_ports 6)"
server=https://$address:$api_port
docker image inspect $pause_image >/dev/null 2>&1 ||
  tar --create --directory "$home/bin" pause | docker import --change 'ENTRYPOINT ["/pause"]' - $pause_image >/dev/null
cd "$run"
write_credentials 2>log/openssl.log
start_control_plane
start_node
within 30 add_services
within 60 kubectl wait --for condition=Ready --timeout 1s node/node
within 30 kubectl get serviceaccount default
cd - >/dev/null
"$@" <&0 9>&- &
command=$!
wait "$command"
