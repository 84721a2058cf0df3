"""The console: a web page that shows the router live."""
