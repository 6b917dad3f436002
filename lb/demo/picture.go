package demo

import "fmt"

// picture draws the network with its addresses.
func (n *network) picture() string {
	lb, s := n.Balancers, n.Servers
	return fmt.Sprintf(`
                 client1   client2
                     └────┬────┘
                       router              AS %d, spreads flows over equal routes (ECMP)
            ┌─────────────┼─────────────┐
           lb1           lb2         switch
      %-13s %-13s       ├── s1  %-12s  %s
        AS %d      AS %d          ├── s2  %-12s  %s
                                        └── s3  %-12s  %s

   service "web": %s and %s, port %d  →  s1, s2, s3, port %d, checked by GET /healthz every %v`,
		routerASN, lb[0].V4, lb[1].V4, s[0].V4, s[0].V6, balancerASN, balancerASN, s[1].V4, s[1].V6, s[2].V4, s[2].V6,
		vip4, vip6, webPort, serverPort, checkInterval)
}
