"""Where every prompt is, and which may be leased or trained next."""
