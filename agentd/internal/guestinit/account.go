package guestinit

import "syscall"

// Account resolves a user as Start does: "", name, uid, name:group or uid:gid against the image's account
// files. A reason that is not empty says why it cannot be.
func Account(spec string, passwd, group []byte) (cred *syscall.Credential, reason, message string) {
	acc, f := lookupUser(spec, passwd, group)
	if f != nil {
		return nil, f.Reason, f.Message
	}
	return acc.cred, "", ""
}
