package wire

import (
	"github.com/dormouse-run/dormouse/pkg/errs"
	"github.com/dormouse-run/dormouse/pkg/sandbox"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// EgressToProto gives the public form of a policy; nil stays nil.
func EgressToProto(e *sandbox.Egress) *dormousev1.EgressPolicy {
	if e == nil {
		return nil
	}
	return &dormousev1.EgressPolicy{DefaultAction: actionToProto(e.Default), Allow: rulesToProto(e.Allow), Deny: rulesToProto(e.Deny)}
}

func rulesToProto(rules []sandbox.EgressRule) []*dormousev1.EgressRule {
	var out []*dormousev1.EgressRule
	for _, r := range rules {
		p := &dormousev1.EgressRule{Cidrs: texts(r.CIDRs), Domains: texts(r.Domains), Protocol: protocolToProto(r.Protocol)}
		for _, ports := range r.Ports {
			p.Ports = append(p.Ports, &dormousev1.PortRange{First: uint32(ports.First), Last: uint32(ports.Last)})
		}
		out = append(out, p)
	}
	return out
}

// EgressFromProto reads the public form of a policy; nil stays nil. It does not validate, but for what has no
// other form.
func EgressFromProto(p *dormousev1.EgressPolicy) (*sandbox.Egress, error) {
	if p == nil {
		return nil, nil //nolint:nilnil // no policy is one
	}
	action, err := enumFromProto(p.GetDefaultAction(), []sandbox.EgressAction{sandbox.EgressAllow, sandbox.EgressDeny}, actionToProto, "egress.default_action")
	if err != nil {
		return nil, err
	}
	e := &sandbox.Egress{Default: action}
	if e.Allow, err = rulesFromProto(p.GetAllow()); err != nil {
		return nil, err
	}
	if e.Deny, err = rulesFromProto(p.GetDeny()); err != nil {
		return nil, err
	}
	return e, nil
}

func rulesFromProto(rules []*dormousev1.EgressRule) ([]sandbox.EgressRule, error) {
	var out []sandbox.EgressRule
	for _, p := range rules {
		protocol, err := enumFromProto(p.GetProtocol(), []sandbox.Protocol{sandbox.TCP, sandbox.UDP, sandbox.ICMP}, protocolToProto, "egress.protocol")
		if err != nil {
			return nil, err
		}
		r := sandbox.EgressRule{CIDRs: cloneSlice(p.GetCidrs()), Domains: cloneSlice(p.GetDomains()), Protocol: protocol}
		for _, ports := range p.GetPorts() {
			first, last := uint16(ports.GetFirst()), uint16(ports.GetLast())
			if uint32(first) != ports.GetFirst() || uint32(last) != ports.GetLast() {
				return nil, errs.New(errs.InvalidField, "egress.ports: first to last, from 1 to 65535").With("field", "egress.ports")
			}
			r.Ports = append(r.Ports, sandbox.PortRange{First: first, Last: last})
		}
		out = append(out, r)
	}
	return out, nil
}

func actionToProto(a sandbox.EgressAction) dormousev1.EgressAction {
	return enumToProto[dormousev1.EgressAction](dormousev1.EgressAction_value, "EGRESS_ACTION_", string(a))
}

func protocolToProto(p sandbox.Protocol) dormousev1.EgressProtocol {
	return enumToProto[dormousev1.EgressProtocol](dormousev1.EgressProtocol_value, "EGRESS_PROTOCOL_", string(p))
}
