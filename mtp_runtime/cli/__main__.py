"""`python -m mtp_runtime.cli`."""

from .main import main

if __name__ == "__main__":
    main()
