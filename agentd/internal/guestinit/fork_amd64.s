#include "textflag.h"

// func vfork(how *cloneArgs, steps *step, errno *uintptr) (pid uintptr)
//
// The child has the parent's memory and stack. It writes to neither, but for errno: it calls nothing and keeps all it needs in
// registers, of which the kernel changes AX, CX and R11.
TEXT ·vfork(SB), NOSPLIT, $0-32
	MOVQ how+0(FP), DI
	MOVQ steps+8(FP), R12
	MOVQ errno+16(FP), R13
	MOVQ $64, SI   // the size of cloneArgs
	MOVQ $435, AX  // clone3
	SYSCALL
	TESTQ AX, AX
	JZ    next
	MOVQ  AX, pid+24(FP)
	RET

next:
	MOVQ 0(R12), AX
	MOVQ 8(R12), DI
	MOVQ 16(R12), SI
	MOVQ 24(R12), DX
	SYSCALL
	CMPQ AX, $0xfffffffffffff001
	JCC  failed
	ADDQ $32, R12  // the size of a step
	JMP  next

failed:
	NEGQ AX
	MOVQ AX, 0(R13)
	MOVQ $127, DI
	MOVQ $60, AX   // exit
	SYSCALL
	INT  $3

// heard is a signal handler that does nothing.
TEXT ·heard(SB), NOSPLIT|NOFRAME, $0
	RET

// heardReturn is where handlers return to.
TEXT ·heardReturn(SB), NOSPLIT|NOFRAME, $0
	MOVQ $15, AX   // rt_sigreturn
	SYSCALL
	INT  $3

// func handlers() (handler, restorer uintptr)
TEXT ·handlers(SB), NOSPLIT, $0-16
	LEAQ ·heard(SB), AX
	MOVQ AX, handler+0(FP)
	LEAQ ·heardReturn(SB), AX
	MOVQ AX, restorer+8(FP)
	RET
