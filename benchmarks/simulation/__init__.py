"""A service on a virtual clock: the router's own placement and admission over modelled workers."""
