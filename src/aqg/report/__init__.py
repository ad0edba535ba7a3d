"""Run directories as people look at them: one HTML file, pictures and tables.

Everything here is made from run directories alone; nothing is computed again.
"""
