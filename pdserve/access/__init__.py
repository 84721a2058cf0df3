"""Who may do what, and over which connections: TLS, tokens, and the parties behind them."""
