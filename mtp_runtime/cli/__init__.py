"""mtpctl: the command line over mtp_runtime.config."""
