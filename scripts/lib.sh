# Shared by the scripts here; sourced, not run.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(dirname "$here")
# shellcheck source=versions.env
. "$here/versions.env"

cache=${DORMOUSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/dormouse}
tools=$cache/tools
bin=$cache/bin
mkdir -p "$tools" "$bin" "$cache/locks" "$cache/logs"

now_ms() { date +%s%3N; }

# say PREFIX TEXT: one line of progress.
say() { printf '[%s] %s\n' "$1" "$2" >&2; }

# took START_MS: the time since then, for people.
took() {
	local ms=$(($(now_ms) - $1))
	printf '%d.%d s' $((ms / 1000)) $((ms % 1000 / 100))
}

die() {
	say error "$1"
	exit 1
}

# logged NAME COMMAND...: run a command with its output in a log, shown on failure.
logged() {
	local name=$1
	shift
	if ! "$@" >>"$cache/logs/$name.log" 2>&1; then
		say "$name" "failed: $*"
		tail -n 40 "$cache/logs/$name.log" >&2
		return 1
	fi
}

# apt_install PACKAGE...: install what is missing, without recommended packages
# and without letting a package start a service. One at a time on the machine.
apt_install() {
	local missing=() p
	for p in "$@"; do
		dpkg-query -W -f '${db:Status-Abbrev}' "$p" 2>/dev/null | grep -q '^ii' || missing+=("$p")
	done
	[ ${#missing[@]} -eq 0 ] && return 0
	[ "$(id -u)" = 0 ] || die "packages ${missing[*]} are missing: run as root, or install them"
	(
		flock 9
		export DEBIAN_FRONTEND=noninteractive
		policy=/usr/sbin/policy-rc.d
		if [ ! -e $policy ]; then
			printf '#!/bin/sh\nexit 101\n' >$policy
			chmod 755 $policy
			trap 'rm -f $policy' EXIT
		fi
		apt_get=(apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
		"${apt_get[@]}" install -y --no-install-recommends "${missing[@]}" ||
			{ apt_update && "${apt_get[@]}" install -y --no-install-recommends "${missing[@]}"; }
	) 9>"$cache/locks/apt"
}

# apt_update: refresh the machine's package lists. A foreign source that cannot be
# reached is no reason to stop: what is missing shows when it is asked for.
apt_update() { apt-get -qq -o DPkg::Lock::Timeout=300 update || true; }

# apt_fetch DIR PACKAGE...: download binary packages, verified by apt, and unpack
# them below DIR. Nothing is installed and nothing is started.
apt_fetch() {
	local dir=$1
	shift
	mkdir -p "$dir/debs"
	(
		flock 9
		cd "$dir/debs"
		fetch=(apt-get -qq -o APT::Sandbox::User=root download)
		"${fetch[@]}" "$@" || { apt_update && "${fetch[@]}" "$@"; }
	) 9>"$cache/locks/apt" || return 1
	local deb
	for deb in "$dir"/debs/*.deb; do
		dpkg -x "$deb" "$dir/root" || return 1
	done
	rm -r "$dir/debs"
}

# apt_targets: this machine's package sources as apt understands them, whatever
# their form: address, suite and component, one a line. Apt lists only what it has
# fetched, so a fresh machine fetches first.
apt_targets() {
	list() { apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages'; }
	if [ -z "$(list)" ]; then
		(flock 9 && apt_update >&2) 9>"$cache/locks/apt"
	fi
	list
}

# debian_mirror: where this machine gets its main Debian suite from.
debian_mirror() {
	local codename uri
	codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
	uri=$(apt_targets | awk -v r="$codename" '$2 == r && $3 == "main" && !seen { print $1; seen = 1 }')
	[ -n "$uri" ] || die "no apt source for $codename main: add one to the machine's apt sources"
	echo "$uri"
}
