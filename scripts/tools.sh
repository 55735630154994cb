#!/bin/bash
# Install the pinned real components into a cache shared by all checkouts.
#
#   scripts/tools.sh [demo|test|dev|all|NAME...]
#   scripts/tools.sh --bin                      say where the links are
#
# Each goes to <cache>/tools/NAME-VERSION, complete or not at all, and is linked
# from <cache>/bin. What is there and intact is left alone, so that a second run
# takes a moment. demo (the default) is what running Dormouse needs; test is what
# only tests need besides, the newer servers; dev is what changing it needs.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

demo_tools=(runsc containerd registry erofs redis busybox)
test_tools=(redis8 valkey9)
dev_tools=(protoc buf golangci-lint)

usage() {
	sed -n '2,11s/^# \{0,1\}//p' "$0"
	echo "names: ${demo_tools[*]} ${test_tools[*]} ${dev_tools[*]}"
}

# ---- one component ----------------------------------------------------------

# provide NAME: do nothing if it is there and intact; else build it beside its
# place, note the digest of each program, and move it there in one step.
provide() {
	local name=$1 version dest tmp start
	version=$("version_$name") || die "no component $name: $(usage)"
	dest=$tools/$name-$version
	(
		flock 8
		if ! intact "$dest"; then
			start=$(now_ms)
			tmp=$tools/.tmp-$name-$version
			rm -rf "$tmp" "$dest"
			mkdir -p "$tmp/bin"
			: >"$cache/logs/$name.log"
			say "$name" "$version: building"
			"build_$name" "$tmp" || die "$name $version could not be built; log: $cache/logs/$name.log"
			"check_$name" "$tmp" || die "$name $version was built, but does not report that version"
			(cd "$tmp" && sha256sum bin/* >.complete) && mv -T "$tmp" "$dest" || die "$dest cannot be written"
			say "$name" "$version: ready in $(took "$start")"
		fi
		link "$dest" || die "$bin cannot be written"
	) 8>"$cache/locks/$name"
}

intact() { [ -e "$1/.complete" ] && (cd "$1" && sha256sum --quiet -c .complete >/dev/null 2>&1); }

# link DIR: point the stable names at the programs in DIR. A link is replaced in
# one step, so a program that starts meanwhile finds the old one or the new one.
link() {
	local p b
	for p in "$1"/bin/*; do
		b=$(basename "$p")
		[ "$(readlink "$bin/$b" || true)" = "$p" ] && continue
		ln -sfn "$p" "$bin/.$b.$BASHPID"
		mv -T "$bin/.$b.$BASHPID" "$bin/$b" || return 1
	done
}

# ---- programs written in Go -------------------------------------------------
# Each is pinned, with all it depends on, by a module of its own under build/.

# go_key MODULE: what else makes a build of it a different one.
go_key() {
	{ go_version && cat "$repo/build/$1"/*; } | sha256sum | cut -c1-8
}
go_version() { echo "${go_version_cached:=$(cd "$repo" && go env GOVERSION)}"; }

# go_build LOG MODULE LDFLAGS DIR PACKAGE...: static programs into DIR/bin.
go_build() {
	local log=$1 module=$2 ldflags=$3 dir=$4
	shift 4
	logged "$log" env GOWORK=off GOFLAGS=-mod=readonly CGO_ENABLED=0 \
		go -C "$repo/build/$module" build -trimpath -buildvcs=false -ldflags "-s -w $ldflags" -o "$dir/bin/" "$@"
}

version_runsc() { echo "$RUNSC_VERSION-$(go_key runsc)"; }
build_runsc() {
	go_build runsc runsc "-X gvisor.dev/gvisor/runsc/version.version=dormouse-$(version_runsc)" "$1" .
}
check_runsc() { "$1/bin/runsc" --version | grep -x >/dev/null "runsc version dormouse-$(version_runsc)"; }

version_containerd() { echo "$CONTAINERD_VERSION-$(go_key containerd)"; }
build_containerd() {
	local m=github.com/containerd/containerd/v2
	go_build containerd containerd "-X $m/version.Version=v$CONTAINERD_VERSION" "$1" $m/cmd/containerd $m/cmd/ctr
}
check_containerd() { "$1/bin/containerd" --version | grep >/dev/null " v$CONTAINERD_VERSION "; }

version_registry() { echo "$REGISTRY_VERSION-$(go_key registry)"; }
build_registry() {
	local m=github.com/distribution/distribution/v3
	go_build registry registry "-X $m/version.version=v$REGISTRY_VERSION" "$1" $m/cmd/registry
}
check_registry() { "$1/bin/registry" --version | grep >/dev/null " v$REGISTRY_VERSION$"; }

version_protoc() { echo "$PROTOC_GEN_GO_VERSION-$(go_key protoc)"; }
build_protoc() {
	local m=github.com/grpc-ecosystem/grpc-gateway/v2
	go_build protoc protoc "-X main.version=v$GRPC_GATEWAY_VERSION" "$1" \
		$m/protoc-gen-grpc-gateway $m/protoc-gen-openapiv2 &&
		go_build protoc protoc "" "$1" \
			google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
}
check_protoc() {
	[ "$("$1/bin/protoc-gen-go" --version)" = "protoc-gen-go v$PROTOC_GEN_GO_VERSION" ] &&
		[ "$("$1/bin/protoc-gen-go-grpc" --version)" = "protoc-gen-go-grpc $PROTOC_GEN_GO_GRPC_VERSION" ] &&
		"$1/bin/protoc-gen-grpc-gateway" --version | grep >/dev/null "v$GRPC_GATEWAY_VERSION"
}

version_buf() { echo "$BUF_VERSION-$(go_key buf)"; }
build_buf() { go_build buf buf "" "$1" github.com/bufbuild/buf/cmd/buf; }
check_buf() { [ "$("$1/bin/buf" --version)" = "$BUF_VERSION" ]; }

version_golangci-lint() { echo "$GOLANGCI_LINT_VERSION-$(go_key lint)"; }
build_golangci-lint() {
	go_build golangci-lint lint "-X main.version=$GOLANGCI_LINT_VERSION" "$1" \
		github.com/golangci/golangci-lint/v2/cmd/golangci-lint
}
check_golangci-lint() { "$1/bin/golangci-lint" version | grep >/dev/null "version $GOLANGCI_LINT_VERSION "; }

# ---- programs from Debian ---------------------------------------------------

version_erofs() { echo "$EROFS_VERSION-static"; }
build_erofs() {
	logged erofs apt_install gcc make autoconf automake libtool pkg-config uuid-dev liblz4-dev zlib1g-dev || return 1
	local src=$1/src
	mkdir -p "$src"
	logged erofs debian_source "$src" "$EROFS_SUITE" erofs-utils "$EROFS_ORIG" "$EROFS_SHA256" &&
		tar -xf "$src/$EROFS_ORIG" -C "$src" --strip-components=1 &&
		(cd "$src" && logged erofs ./autogen.sh &&
			logged erofs ./configure --disable-fuse --without-selinux --enable-multithreading --enable-lz4 \
				--disable-lzma --without-libdeflate --without-libzstd --without-xxhash &&
			logged erofs make -j"$(nproc)" LDFLAGS=-all-static) || return 1
	local p
	for p in mkfs dump fsck; do
		install -s -m 755 "$src/$p/$p.erofs" "$1/bin/" || return 1
	done
	rm -rf "$src"
}
check_erofs() { "$1/bin/mkfs.erofs" --version 2>&1 | grep >/dev/null "(erofs-utils) $EROFS_VERSION"; }

# debian_source DIR SUITE PACKAGE FILE SHA256: fetch the original sources of a
# package of another suite, from the mirror this machine uses, through package
# lists of our own: those of the machine stay as they are.
debian_source() {
	local dir=$1 apt opts
	apt=$dir/apt
	mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
	echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) $2 main" >"$apt/sources.list"
	opts=(-o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
		-o "Dir::State::Lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
	apt-get "${opts[@]}" update &&
		(cd "$dir" && apt-get "${opts[@]}" source --download-only --tar-only "$3") || return 1
	if [ -e "$dir/$4" ]; then
		echo "$5  $dir/$4" | sha256sum -c
		return
	fi
	# A suite that is not released yet moves on. Its signed index vouches for what
	# it has instead, and the check of the version for what that may be.
	echo "$2 has no $4 any more: move the pin in scripts/versions.env"
	mv "$dir/$3"_*.orig.tar.* "$dir/$4"
}

# c_server NAME DIR SUITE PACKAGE FILE SHA256 PROGRAM: build one program of a Redis
# or a fork of it, for tests: without what they do not use, and quickly.
c_server() {
	local src=$2/src
	logged "$1" apt_install gcc g++ libc6-dev make || return 1
	mkdir -p "$src"
	logged "$1" debian_source "$src" "$3" "$4" "$5" "$6" &&
		tar -xf "$src/$5" -C "$src" --strip-components=1 &&
		logged "$1" make -C "$src/src" -j2 BUILD_TLS=no USE_SYSTEMD=no MALLOC=libc OPTIMIZATION=-O1 DEBUG= "$7" &&
		install -s -m 755 "$src/src/$7" "$2/bin/$1-server" &&
		rm -rf "$src"
}

version_redis8() { echo "$REDIS8_VERSION"; }
build_redis8() { c_server redis8 "$1" "$REDIS8_SUITE" redis "$REDIS8_ORIG" "$REDIS8_SHA256" redis-server; }
check_redis8() { "$1/bin/redis8-server" --version | grep >/dev/null " v=8\."; }

version_valkey9() { echo "$VALKEY9_VERSION"; }
build_valkey9() { c_server valkey9 "$1" "$VALKEY9_SUITE" valkey "$VALKEY9_ORIG" "$VALKEY9_SHA256" valkey-server; }
check_valkey9() { "$1/bin/valkey9-server" --version | grep >/dev/null "^Valkey server v=9\."; }

version_redis() { echo "$REDIS_VERSION-benchmark"; }
build_redis() {
	logged redis apt_fetch "$1" redis-server redis-tools libjemalloc2 liblua5.1-0 liblzf1 lua-bitop lua-cjson \
		libatomic1 libhiredis0.14 libssl3 libsystemd0 || return 1
	# The libraries stay beside the programs: nothing on the machine changes, and
	# nothing on it can take them away.
	local p lib
	lib=$(dirname "$(find "$1/root" -name 'libjemalloc.so.2' | head -n 1)")
	for p in redis-server redis-cli redis-benchmark; do
		printf '#!/bin/sh\nhere=$(dirname "$(readlink -f "$0")")/..\nLD_LIBRARY_PATH=$here/%s exec "$here/root/usr/bin/%s" "$@"\n' \
			"${lib#"$1/"}" "$p" >"$1/bin/$p"
		chmod 755 "$1/bin/$p"
	done
}
check_redis() { "$1/bin/redis-server" --version | grep >/dev/null " v=$REDIS_VERSION "; }

version_busybox() { echo "$BUSYBOX_VERSION"; }
build_busybox() {
	logged busybox apt_fetch "$1" busybox-static &&
		mv "$1/root/bin/busybox" "$1/bin/" && rm -rf "$1/root"
}
check_busybox() { "$1/bin/busybox" | grep >/dev/null "^BusyBox v$BUSYBOX_VERSION "; }

# ---- the order --------------------------------------------------------------

# lane NAME...: one after another. Two lanes run at once: compiling wants the
# processors, packages want the network.
lane() {
	local n
	for n in "$@"; do provide "$n" || return 1; done
}

main() {
	local want=() n go_lane=() apt_lane=() start
	[ $# -eq 0 ] && set -- demo
	for n in "$@"; do
		case $n in
		demo) want+=("${demo_tools[@]}") ;;
		test) want+=("${test_tools[@]}") ;;
		dev) want+=("${dev_tools[@]}") ;;
		all) want+=("${demo_tools[@]}" "${test_tools[@]}" "${dev_tools[@]}") ;;
		--bin) echo "$bin" && return ;;
		-h | --help) usage && return ;;
		*) declare -F "version_$n" >/dev/null || die "no component $n. $(usage)"; want+=("$n") ;;
		esac
	done
	command -v go >/dev/null || die "go is not installed: install Go $(sed -n 's/^go //p' "$repo/go.mod") or newer"
	go_version >/dev/null
	export go_version_cached
	for n in "${want[@]}"; do
		case $n in
		erofs | redis | busybox | redis8 | valkey9) apt_lane+=("$n") ;;
		*) go_lane+=("$n") ;;
		esac
	done
	start=$(now_ms)
	lane "${apt_lane[@]}" &
	local pid=$! ok=0
	lane "${go_lane[@]}" || ok=1
	wait "$pid" || ok=1
	[ $ok = 0 ] || die "not everything could be installed; run it again when the reason above is gone"
	say tools "${want[*]}: in place ($(took "$start"))"
}

main "$@"
