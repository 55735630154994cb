#!/usr/bin/env bash
# Builds a runtime bundle: runsc and guest init under one digest.
#
#   scripts/bundle.sh OUT    makes the folder OUT with runsc, guestinit.erofs and bundle.json
#
# The same sources and tools give the same digest. OUT is replaced as a whole.
set -euo pipefail

out=${1:?usage: scripts/bundle.sh OUT}
# shellcheck source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

for tool in runsc mkfs.erofs; do
	[ -x "$bin/$tool" ] || die "$tool is missing: run scripts/tools.sh first"
done

mkdir -p "$(dirname "$out")"
stage=$(mktemp -d "$(dirname "$out")/.bundle-XXXXXX")
trap 'rm -rf "$stage"' EXIT

mkdir "$stage/bundle" "$stage/init"
cp -L "$bin/runsc" "$stage/bundle/runsc"
chmod 0755 "$stage/bundle/runsc" "$stage/init"
for program in guestinit guestbulk; do
	(cd "$repo" && CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags='-s -w' -o "$stage/init/$program" "./agentd/cmd/$program")
	chmod 0755 "$stage/init/$program"
done

# The flags make the file depend on nothing but its content; gVisor cannot map inline data.
"$bin/mkfs.erofs" --quiet -b4096 -U clear -Enoinline_data -T0 --all-root \
	"$stage/bundle/guestinit.erofs" "$stage/init" >/dev/null

cd "$stage/bundle"
version=$(./runsc --version | sed -n 's/^runsc version //p')
sum() { sha256sum "$1" | cut -d' ' -f1; }
digest=$(sha256sum guestinit.erofs runsc | sha256sum | cut -d' ' -f1)
cat >bundle.json <<JSON
{
  "digest": "sha256:$digest",
  "runsc_version": "$version",
  "files": {
    "guestinit.erofs": "sha256:$(sum guestinit.erofs)",
    "runsc": "sha256:$(sum runsc)"
  }
}
JSON
cd - >/dev/null

chmod 0755 "$stage/bundle"
rm -rf "$out"
mv "$stage/bundle" "$out"
echo "sha256:$digest"
