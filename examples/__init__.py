"""Programs that show OrScale at work. None of them belongs to the package."""
