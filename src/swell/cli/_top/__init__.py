"""The live screen of `swell top`: what it knows, how that is drawn with characters, and the textual app."""
