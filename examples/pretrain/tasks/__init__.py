"""What is trained on what.

=======  ===========================================================================
decoder  a dense decoder and its loss
text     text and tokens as data
images   a classifier of images, its loss and its data
=======  ===========================================================================
"""
