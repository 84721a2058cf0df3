"""`pdserve up`: router and workers started, watched and stopped together."""
