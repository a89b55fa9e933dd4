"""What is chosen by measuring before a run begins. May import options and errors only; what is measured is handed in."""
