"""The command line: one file a command, each with HELP, `add_arguments(parser)` and `run(arguments) -> exit code`."""
