"""Graph x Cluster -> Plan -> Programs: pure functions, no torch."""
