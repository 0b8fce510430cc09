"""Variables sharded across ranks: who owns which rows and columns, and the exchange that looks up their rows."""
