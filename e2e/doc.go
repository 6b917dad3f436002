// Package e2e has stories: what users see when the whole program meets real routers, real clients and real failures.
// Its hosts are namespaces (e2e/lab), its routers BIRD and FRR, its balancers "steelyard run" as it is built.
package e2e
