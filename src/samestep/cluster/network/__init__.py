"""How hosts reach each other: addresses, interfaces, and the stores through which they meet."""
