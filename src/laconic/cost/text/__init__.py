"""Plans and predictions as text and pictures."""
