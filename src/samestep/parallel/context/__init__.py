"""Context parallel: tokens split over ranks, which meet in attention."""
