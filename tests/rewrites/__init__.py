"""Rewrites of methods from their papers' equations, which the library's runs must agree with."""
