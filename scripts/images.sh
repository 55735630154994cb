#!/bin/bash
# Build the images that the demo and the tests use, as OCI layouts in the cache.
#
#   scripts/images.sh [busybox|python|programs]...      (default: busybox and python)
#
# No public registry is needed: busybox comes from Debian's static build, python
# is a Debian root made on this machine from its own package mirror, and programs is
# that with what agents work with: Node.js, git, pip and apt. An image is
# keyed by its recipe, so a second run takes a moment. Nothing in it names the
# mirror.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

store=$cache/images
suite=bookworm
path=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# The time of everything that has no better one, so that equal input gives equal
# digests.
export SOURCE_DATE_EPOCH=1600000000

# The recipe of an image decides its key: change it, and it is built again.
recipe() { declare -f "root_$1" "command_$1" debian_root; declare -p suite path SOURCE_DATE_EPOCH BUSYBOX_VERSION; }

# provide NAME: build the image unless it is there.
provide() {
	local name=$1 dest tmp start
	declare -F "root_$name" >/dev/null || die "no image $name: there are busybox, python and programs"
	dest=$store/$name-$(recipe "$name" | sha256sum | cut -c1-12)
	(
		flock 8
		if [ ! -e "$dest/index.json" ]; then
			start=$(now_ms)
			tmp=$store/.tmp-$name
			rm -rf "$tmp"
			mkdir -p "$tmp"
			: >"$cache/logs/image-$name.log"
			say "image $name" "building"
			"root_$name" "$tmp" "$tmp/root.tar" || die "image $name could not be built; log: $cache/logs/image-$name.log"
			# shellcheck disable=SC2046
			logged "image-$name" go -C "$repo" run ./test/cmd/imagelayout -env "$path" \
				"$tmp/root.tar" "$tmp/layout" $("command_$name") || die "image $name could not be packed"
			rm -rf "$dest"
			mv -T "$tmp/layout" "$dest"
			rm -rf "$tmp"
			say "image $name" "ready in $(took "$start"), $(du -sh "$dest" | cut -f1)"
		fi
		ln -sfn "$dest" "$store/.$name"
		mv -T "$store/.$name" "$store/$name"
	) 8>"$cache/locks/image-$name"
}

command_busybox() { echo sh; }
root_busybox() {
	local root=$1/root applet
	"$here/tools.sh" busybox
	mkdir -p "$root"/{bin,dev,etc,proc,root,run,sys,tmp,usr,var/tmp}
	chmod 1777 "$root/tmp" "$root/var/tmp"
	install -m 755 "$bin/busybox" "$root/bin/busybox"
	for applet in $("$bin/busybox" --list); do
		[ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
	done
	printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n' >"$root/etc/passwd"
	printf 'root:x:0:\nnogroup:x:65534:\n' >"$root/etc/group"
	tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$root" -cf "$2" .
}

command_python() { echo python3; }
root_python() { debian_root "$2" python3,ca-certificates,netbase; }

command_programs() { echo sh; }
root_programs() { debian_root "$2" apt,python3,python3-pip,nodejs,git,ca-certificates,netbase; }

# debian_root TAR PACKAGES: a Debian with these packages, and nothing of this machine in it.
debian_root() {
	[ "$(id -u)" = 0 ] || die "the image is a Debian root: run as root"
	logged "image-$name" apt_install mmdebstrap || return 1
	# The sources of this machine, as they are: whatever mirror and keyring they
	# name. They go to the package tool only; the image gets none.
	local sources
	sources=$(debian_sources "$suite")
	logged "image-$name" mmdebstrap --quiet --mode=root --variant=essential --include="$2" \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
		--customize-hook='rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap' \
		--customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/log/* "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap' \
		--customize-hook='rm -f "$1"/etc/hostname "$1"/etc/resolv.conf; : >"$1"/etc/machine-id' \
		"$suite" "$1" - <<<"$sources" || return 1
	local host
	host=$(debian_mirror | sed 's#^[a-z+]*://\([^/]*\)/.*#\1#')
	if tar -xOf "$1" ./etc ./var | grep -aF "$host" >/dev/null; then
		die "the image names the mirror it was made from"
	fi
}

# debian_sources SUITE: this machine's sources of the suite, one line each.
debian_sources() {
	apt_targets | awk -v s="$1" -v k=/usr/share/keyrings/debian-archive-keyring.gpg \
		'$3 == "main" && ($2 == s || $2 == s "-updates" || $2 == s "-security") { print "deb [signed-by=" k "] " $1 " " $2 " main" }'
}

mkdir -p "$store"
[ $# -gt 0 ] || set -- busybox python
for n in "$@"; do provide "$n"; done
