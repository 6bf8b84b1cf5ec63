"""An emulator of PTX that shares nothing with the product: its own reader and its own machine."""
