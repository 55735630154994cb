#!/bin/bash
# Generate code and OpenAPI from the protos, with the pinned plugins.
#
#   scripts/gen.sh           replace what is committed
#   scripts/gen.sh check     compare it with what is committed, lint the protos, and
#                            look for breaking changes; the tree stays as it is
#
# Breaking changes are looked for against BASE, by default the main branch.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
export PATH=$bin:$PATH
cd "$repo"

[ -x "$bin/buf" ] && [ -x "$bin/protoc-gen-go" ] || die "buf and its plugins are missing: run scripts/tools.sh dev"

# generated DIR: the generated files below DIR, relative to it.
generated() { (cd "$1" && find proto docs/openapi -type f \( -name '*.pb.go' -o -name '*.pb.gw.go' -o -name '*.swagger.json' \) | sort); }

# base: the commit whose protos callers may hold.
base() {
	local ref
	for ref in "${BASE:-}" origin/main main HEAD; do
		[ -n "$ref" ] && git rev-parse -q --verify "$ref^{commit}" && return
	done
	die "this is no git checkout: set BASE to a commit"
}

make_fresh() {
	mkdir -p "$1/proto" "$1/docs/openapi"
	local template
	for template in buf.gen*.yaml; do buf generate --template "$template" -o "$1"; done
}

main() {
	local fresh status=0 ref
	mkdir -p "$repo/bin"
	fresh=$(mktemp -d "$repo/bin/.gen-XXXXXX")
	# shellcheck disable=SC2064
	trap "rm -rf '$fresh'" EXIT
	make_fresh "$fresh"
	case ${1:-} in
	"")
		generated . | xargs -r rm -f
		cp -R "$fresh/proto" "$fresh/docs" .
		;;
	check)
		diff <(generated "$fresh") <(generated .) >/dev/null || {
			say gen "other files are committed than the protos give:"
			diff <(generated "$fresh") <(generated .) >&2 || true
			status=1
		}
		while read -r file; do
			diff -q "$fresh/$file" "$file" >/dev/null 2>&1 || { say gen "$file is not what the protos give" && status=1; }
		done < <(generated "$fresh")
		[ $status = 0 ] || die "run make gen and commit what it changes"
		buf lint
		ref=$(base)
		if git cat-file -e "$ref:proto" 2>/dev/null; then
			buf breaking --against ".git#ref=$ref"
		fi
		;;
	*) die "want no argument, or check; got $1" ;;
	esac
}

main "$@"
