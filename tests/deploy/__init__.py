"""Charts, images and documents of deploy/, checked by real tools without a cluster."""
