"""The router over a thousand modelled workers and more: cost, overload, tenants, a hot prefix."""
