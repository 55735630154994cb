// Asked prints its wall clock, and how much its monotonic clock says went by, for each line that it reads.
package main

import (
	"bufio"
	"fmt"
	"os"
	"time"

	"github.com/dormouse-run/dormouse/pkg/fault"
)

func main() {
	fault.Open(os.Args[1])
	began := time.Now()
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		fmt.Println(time.Now().UnixNano(), int64(time.Since(began)))
	}
}
