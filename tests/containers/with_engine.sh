#!/bin/bash
# Runs a command that needs Docker with Compose: `with_engine.sh COMMAND...`.
#
# Where an engine answers it is used. Where none is there (a CI machine with root and Debian's packages),
# Debian's is installed and started beside everything else: a socket, a data directory and plugins of its
# own below the cache directory. It is ended with the command; its build cache stays for the next time.
set -euo pipefail

home=${XDG_CACHE_HOME:-$HOME/.cache}/grpo/docker
plugins=(docker-compose docker-buildx)

complete() {
  docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1
}

if complete; then
  exec "$@"
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "no Docker engine with Compose and buildx answers, and this is no Debian with root to start one" >&2
  exit 1
fi

mirror() { # where this host gets Debian from
  # shellcheck disable=SC2016  # a field of apt's
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1 | sed 's|/*$||'
}

install_engine() {
  if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends \
      docker.io iptables debootstrap >/dev/null
  fi
}

# Debian 12 has neither plugin; those of Debian 13 are single Go binaries that run on both.
install_plugins() {
  mkdir -p "$home/config/cli-plugins"
  local index plugin file work
  for plugin in "${plugins[@]}"; do
    if [ -x "$home/config/cli-plugins/$plugin" ]; then
      continue
    fi
    work=$(mktemp -d)
    index=${index:-$(curl -fsS "$(mirror)/dists/trixie/main/binary-$(dpkg --print-architecture)/Packages.xz" | xz -d)}
    file=$(awk -v RS= -v package="$plugin" '$0 ~ "^Package: " package "\n"' <<<"$index" | awk '/^Filename:/ {print $2}')
    curl -fsS -o "$work/plugin.deb" "$(mirror)/$file"
    dpkg-deb --extract "$work/plugin.deb" "$work"
    install -m 755 "$work/usr/libexec/docker/cli-plugins/$plugin" "$home/config/cli-plugins/$plugin"
    rm -rf "$work"
  done
}

stop_engine() {
  kill "$engine" 2>/dev/null || true
  wait || true
}

start_engine() {
  rm -f "$home/dockerd.pid" "$home/docker.sock"
  # Without the locks of this script and of with_cluster.sh, which containers would inherit and hold.
  setpriv --pdeathsig TERM dockerd --host "$DOCKER_HOST" --data-root "$home/data" --exec-root "$home/exec" \
    --pidfile "$home/dockerd.pid" >"$home/dockerd.log" 2>&1 8>&- 9>&- &
  engine=$!
  trap stop_engine EXIT
  for _ in $(seq 360); do
    if docker info >/dev/null 2>&1; then
      return
    fi
    sleep 0.5
  done
  tail -n 20 "$home/dockerd.log" >&2
  echo "the Docker engine did not start within 180 s; its log is $home/dockerd.log" >&2
  exit 1
}

mkdir -p "$home"
install_engine
install_plugins
export DOCKER_HOST=unix://$home/docker.sock DOCKER_CONFIG=$home/config
exec 8>"$home/lock" # held from an engine's start to its end
until complete || flock --nonblock 8; do
  sleep 0.5
done
if complete; then # another call's, which ends it
  exec "$@" 8>&-
fi
start_engine
"$@" 8>&-
