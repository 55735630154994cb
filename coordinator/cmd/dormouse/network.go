package main

import (
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/dormouse-run/dormouse/pkg/command"
	"github.com/dormouse-run/dormouse/pkg/config"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

func modeOf(m dormousev1.NetworkMode) string {
	return strings.ToLower(strings.TrimPrefix(m.String(), "NETWORK_MODE_"))
}

func networkColumns() []command.Column[*dormousev1.SandboxNetwork] {
	type col = command.Column[*dormousev1.SandboxNetwork]
	count := func(of func(*dormousev1.SandboxNetwork) uint64) func(*dormousev1.SandboxNetwork) string {
		return func(n *dormousev1.SandboxNetwork) string { return strconv.FormatUint(of(n), 10) }
	}
	return []col{
		{Name: "MODE", Show: func(n *dormousev1.SandboxNetwork) string { return modeOf(n.GetMode()) }},
		{Name: "ADDRESS", Show: (*dormousev1.SandboxNetwork).GetAddress},
		{Name: "SENT", Show: func(n *dormousev1.SandboxNetwork) string { return config.FormatBytes(int64(n.GetSentBytes())) }},
		{Name: "RECEIVED", Show: func(n *dormousev1.SandboxNetwork) string { return config.FormatBytes(int64(n.GetReceivedBytes())) }},
		{Name: "REFUSED", Show: count((*dormousev1.SandboxNetwork).GetRefusedPackets)},
		{Name: "REFUSED-NAMES", Show: count((*dormousev1.SandboxNetwork).GetRefusedNames)},
	}
}

func networkCommand() *cli.Command {
	return &cli.Command{
		Name: "network", Usage: "show what the network of a sandbox has seen: bytes, and packets and names that were refused", ArgsUsage: "SANDBOX",
		Flags: callFlags(false),
		Action: action(1, 1, func(c call) error {
			s, err := c.client.FindSandbox(c.ctx, c.Args().First())
			if err != nil {
				return err
			}
			n, err := s.Network(c.ctx)
			if err != nil {
				return err
			}
			return command.One(c.print, n, (*dormousev1.SandboxNetwork).GetAddress, networkColumns())
		}),
	}
}
