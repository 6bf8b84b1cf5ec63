"""What each kernel costs on each device type, and each link per byte: measured where the hardware is
at hand, modelled where it is not, and always marked which of the two.
"""
