package guestinit

import "syscall"

// The account files of an image are read as far as this; larger ones are cut.
const accountFileLimit = 1 << 20

type account struct {
	cred *syscall.Credential
	home string
}

// lookupUser resolves "", name, uid, name:group or uid:gid against the image's account files as
// docker does: a number need not be listed; a name must be.
func lookupUser(spec string, passwd, group []byte) (account, *failure) {
	user, grp, hasGroup := cut(spec, ':')
	if user == "" {
		user = "0"
	}
	acc := account{cred: &syscall.Credential{}, home: "/"}
	uid, numeric := atoi(user)
	found, name := false, ""
	eachLine(passwd, func(f []string) bool {
		if len(f) < 6 {
			return true
		}
		fuid, ok1 := atoi(f[2])
		fgid, ok2 := atoi(f[3])
		if !ok1 || !ok2 || (f[0] != user && (!numeric || fuid != uid)) {
			return true
		}
		found, name, acc.home = true, f[0], f[5]
		acc.cred.Uid, acc.cred.Gid = uint32(fuid), uint32(fgid)
		return false
	})
	if !found {
		if !numeric {
			return acc, fail("USER_NOT_FOUND", "the image has no user of this name; use one from its /etc/passwd, or a number").of("user", spec)
		}
		acc.cred.Uid = uint32(uid)
	}
	if acc.home == "" {
		acc.home = "/"
	}
	if hasGroup {
		gid, ok := lookupGroup(grp, group)
		if !ok {
			return acc, fail("USER_NOT_FOUND", "the image has no group of this name; use one from its /etc/group, or a number").of("user", spec)
		}
		acc.cred.Gid = gid
		return acc, nil
	}
	if name != "" {
		acc.cred.Groups = groupsOf(name, group)
	}
	return acc, nil
}

// join adds supplementary groups, names or ids.
func (acc *account) join(groups []string, group []byte) *failure {
	for _, g := range groups {
		gid, ok := lookupGroup(g, group)
		if !ok {
			return fail("USER_NOT_FOUND", "the image has no group of this name; use one from its /etc/group, or a number").of("group", g)
		}
		acc.cred.Groups = append(acc.cred.Groups, gid)
	}
	return nil
}

func lookupGroup(grp string, group []byte) (gid uint32, ok bool) {
	n, numeric := atoi(grp)
	eachLine(group, func(f []string) bool {
		if len(f) < 3 || f[0] != grp {
			return true
		}
		if v, good := atoi(f[2]); good {
			gid, ok = uint32(v), true
		}
		return !ok
	})
	if !ok && numeric {
		return uint32(n), true
	}
	return gid, ok
}

func groupsOf(name string, group []byte) []uint32 {
	var out []uint32
	eachLine(group, func(f []string) bool {
		if len(f) < 4 {
			return true
		}
		gid, ok := atoi(f[2])
		for rest := f[3]; ok && rest != ""; {
			var member string
			member, rest, _ = cut(rest, ',')
			if member == name {
				out = append(out, uint32(gid))
				break
			}
		}
		return len(out) < 1024
	})
	return out
}

// eachLine calls f with the colon-separated fields of each line until it returns false.
func eachLine(data []byte, f func([]string) bool) {
	for rest := string(data); rest != ""; {
		var line string
		line, rest, _ = cut(rest, '\n')
		if line == "" || line[0] == '#' {
			continue
		}
		var fields []string
		for more := true; more; {
			var one string
			one, line, more = cut(line, ':')
			fields = append(fields, one)
		}
		if !f(fields) {
			return
		}
	}
}

func hasPrefix(s, prefix string) bool { return len(s) >= len(prefix) && s[:len(prefix)] == prefix }

func cut(s string, sep byte) (before, after string, found bool) {
	for i := range len(s) {
		if s[i] == sep {
			return s[:i], s[i+1:], true
		}
	}
	return s, "", false
}
