//go:build faults && wallclock

#include "textflag.h"

// moved is clock_gettime in C's calling convention, on a stack of the system's: DI is the clock, SI where the time
// goes. What C has its callers keep is not touched, and AX is the kernel's answer.
TEXT ·moved(SB), NOSPLIT|NOFRAME, $0
	SUBQ	$24, SP
	MOVQ	DI, 0(SP)
	MOVQ	SI, 8(SP)
	MOVQ	·kernel(SB), AX
	CALL	AX
	MOVQ	0(SP), DI
	MOVQ	8(SP), SI
	CMPL	DI, $0	// CLOCK_REALTIME
	JNE	done
	MOVQ	·ahead(SB), CX
	MOVQ	0(CX), CX
	ADDQ	CX, 0(SI)
done:
	ADDQ	$24, SP
	RET

DATA ·movedClock+0(SB)/8, $·moved(SB)
GLOBL ·movedClock(SB), NOPTR, $8
