#!/bin/bash
# Makes the image that all others are built on, from Debian's packages: `make_base.sh IMAGE`.
# It stands for python:3.11-slim-bookworm on machines that reach no registry, and has that image's sources of packages:
# those of this Debian 12, with the fixes of security faults.
set -euo pipefail
image=$1
targets() { # "deb URI SUITE COMPONENT" of this host
  apt-get indextargets --format "deb \$(REPO_URI) \$(RELEASE) \$(COMPONENT)" 'Created-By: Packages'
}
mirror=$(targets | awk 'NR == 1 {sub("/*$", "", $2); print $2}')
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "$mirror"
targets | grep ' bookworm' >"$root/etc/apt/sources.list" || echo "deb $mirror bookworm main" >"$root/etc/apt/sources.list"
chroot "$root" sh -euc 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get upgrade -qq --yes >/dev/null'
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/* \
  "$root"/usr/share/doc "$root"/usr/share/man
tar -C "$root" -c . | docker import \
  --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' - "$image"
