"""Commands of the command line: one module for each group, loaded when one of its commands is called."""
