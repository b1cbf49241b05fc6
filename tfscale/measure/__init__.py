"""Measurements of links, layers and steps, and what is concluded from them."""
