"""The commands of nanokv, one file each: add_arguments(parser) and run(args)."""
