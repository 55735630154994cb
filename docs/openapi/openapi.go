// Package openapi holds the OpenAPI description of the REST API, generated from the protos.
package openapi

import _ "embed"

// Spec is the description, as JSON (Swagger 2.0).
//
//go:embed dormouse.swagger.json
var Spec []byte
