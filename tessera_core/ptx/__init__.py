"""From PTX text to the bytes that a launch may and must touch: lexer, parser, table of instruction
effects and abstract interpreter. Pure Python; needs no GPU, driver or compiler.
"""
