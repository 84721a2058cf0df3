"""One module a subcommand; `register` adds its parser, and its handler returns the exit code."""
