#!/bin/bash
# Builds the programs of a Kubernetes cluster: `build_cluster.sh DIRECTORY` fills DIRECTORY/bin.
#
# Debian 12 packages kubectl and etcd, but no server of Kubernetes. Its source package is complete, with
# every dependency, and Debian's Go builds it: about 8 minutes on 2 cores, 3 GB while it builds, 0.6 GB after.
# All is unpacked below DIRECTORY; nothing is installed in the system.
set -euo pipefail
home=$(realpath "$1")
version=1.20.2 # the newest that Debian has as source
packages=(etcd-server kubernetes-client golang-1.19-go golang-1.19-src)
programs=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet)

rm -rf "$home"/build.* # of a build that was killed
work=$(mktemp -d "$home/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
source=$work/go/src/k8s.io/kubernetes

fetch() { # apt's own download and signature checks, with an index of source packages
  local mirror suite
  mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' | head -n 1 | sed 's|/*$||')
  for suite in deb deb-src; do
    echo "$suite [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main"
  done >"$work/sources.list"
  mkdir "$work/lists"
  local options=(-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$work/lists"
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
  cd "$work"
  apt-get "${options[@]}" -qq update
  apt-get "${options[@]}" -qq download "${packages[@]}"
  apt-get "${options[@]}" -qq source --download-only kubernetes
  for package in *.deb; do
    dpkg-deb --extract "$package" "$work/debian"
  done
  mkdir -p "$(dirname "$source")"
  dpkg-source --no-check --extract kubernetes_*.dsc "$source" >/dev/null
}

change_source() {
  # A virtual machine or a container may forbid scores below 0.
  sed -i -E 's/(defaultSandboxOOMAdj int = )-998/\10/' "$source/pkg/kubelet/dockershim/docker_sandbox.go"
  sed -i -E 's/(guaranteedOOMScoreAdj int = )-997/\10/' "$source/pkg/kubelet/qos/policy.go"
  # A deleted pod disappears within seconds. The kubelet else notices its end only after up to a minute.
  sed -i 's/ContainerGCPeriod = time.Minute/ContainerGCPeriod = 5 * time.Second/' "$source/pkg/kubelet/kubelet.go"
  sed -i 's/const syncPeriod = 10 \*/const syncPeriod = 1 */' "$source/pkg/kubelet/status/status_manager.go"
  # Volumes lie beside the cluster's other data, and a container of any user may write to them.
  sed -i -e "s|\"/tmp/|\"$home/run/|" -e 's|HostPath.Path, 0750)|HostPath.Path, 0777)|' "$source/pkg/volume/hostpath/host_path.go"
}

build() {
  export GOROOT=$work/debian/usr/lib/go-1.19 GOPATH=$work/go GOCACHE=$work/cache GOFLAGS='' GO111MODULE=off CGO_ENABLED=0
  local go=$GOROOT/bin/go package=k8s.io/kubernetes types flags=() module
  cd "$source"
  # The one generated file that the source package lacks: the description of the API, which helm checks manifests with.
  "$go" build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  types=$(grep --recursive --files-with-matches --include='*.go' '^// *+k8s:openapi-gen=' pkg staging/src/k8s.io |
    grep --invert-match -e /code-generator/ -e /sample-apiserver/ | xargs --max-args=1 dirname | sort --unique |
    sed -e 's|^staging/src/|vendor/|' -e "s|^|$package/|" | paste --serial --delimiters=,)
  PATH=$GOROOT/bin:$PATH "$work/openapi-gen" --input-dirs "$types" --output-package "$package/pkg/generated/openapi" \
    --output-file-base zz_generated.openapi --go-header-file hack/boilerplate/boilerplate.generatego.txt \
    --report-filename "$work/violations"
  for module in client-go/pkg component-base; do
    flags+=(-X "$package/vendor/k8s.io/$module/version.gitVersion=v$version"
      -X "$package/vendor/k8s.io/$module/version.gitMajor=1" -X "$package/vendor/k8s.io/$module/version.gitMinor=20")
  done
  mkdir "$work/bin"
  "$go" build -ldflags "-s -w ${flags[*]}" -o "$work/bin/" "${programs[@]/#/./cmd/}"
  build_pause
}

# The container that holds a pod's namespaces. It reaps the orphans of a shared process namespace.
build_pause() {
  cat >"$work/pause.go" <<'END'
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signal.Ignore(syscall.SIGCHLD) // the kernel then reaps them
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGINT, syscall.SIGTERM)
	<-end
}
END
  "$GOROOT/bin/go" build -ldflags '-s -w' -o "$work/bin/pause" "$work/pause.go"
}

fetch
change_source
build
cp "$work"/debian/usr/bin/{etcd,kubectl} "$work/bin/"
mv "$work/bin" "$home/bin"
