"""Following the load: the monitor that sees pressure in a window of requests and the controller that
decides which plan new requests enter.
"""
