"""Attention over sequences that are too long for a card's memory: `sequence` says what it does."""
