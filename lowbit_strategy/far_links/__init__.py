"""`far_links=`: a transport for ranks that are far apart."""
