"""How well times of one GPU predict another's: seen or left out of the fit, against a plain ratio of rooflines."""
