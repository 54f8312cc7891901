"""The forwards that replace those of sites, one file per kind."""
