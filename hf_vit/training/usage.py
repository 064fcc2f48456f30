"""What a model card shows of how a model is used: without the package, and with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Code that uses a model on `image.png`.

    Args:
        name: What to call the stock pipeline.
        stock: What to do with it.
        own: What to do with the `outputs` of `model` for `image`, and `image_processor`.
        processor: Name of what prepares the inputs, "processor" where texts are among them.
        inputs: What it is given.
    """

    name: str
    stock: str
    own: str
    processor: str = "image_processor"
    inputs: str = "images=image"

    @property
    def processor_class(self) -> str:
        """Name of the class of `processor`."""
        return {"image_processor": "HfViTImageProcessor", "processor": "HfViTProcessor"}[self.processor]


# By class of the model
USAGE = {
    "HfViTForImageClassification": Usage(
        name="classify",
        stock='print(classify("image.png"))',
        own="print(model.config.id2label[int(outputs.logits.argmax())])",
    ),
    "HfViTForSemanticSegmentation": Usage(
        name="segment",
        stock="""for part in segment("image.png"):
    print(part["label"], part["mask"])  # white in the mask is where the image shows it""",
        own="""sizes = [(image.height, image.width)]
(classes,) = image_processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)
print(classes.shape, [model.config.id2label[number] for number in classes.unique().tolist()])""",
    ),
    "HfViTForUniversalSegmentation": Usage(
        name="segment",
        stock="""for part in segment("image.png", subtask="panoptic"):  # or "instance", "semantic"
    print(part["label"], part["score"], part["mask"])  # white in the mask is where the image shows it""",
        own="""sizes = [(image.height, image.width)]
(result,) = image_processor.post_process_panoptic_segmentation(outputs, target_sizes=sizes)
print(result["segmentation"].shape, result["segments_info"])""",
    ),
    "HfViTForDepthEstimation": Usage(
        name="estimate",
        stock="""result = estimate("image.png")
print(result["predicted_depth"])  # (height, width)
result["depth"].save("depth.png")  # the lowest value is black, the highest white""",
        own="""sizes = [(image.height, image.width)]
(result,) = image_processor.post_process_depth_estimation(outputs, target_sizes=sizes)
print(result["predicted_depth"])  # (height, width)""",
    ),
    "HfViTForObjectDetection": Usage(
        name="detect",
        stock="""for found in detect("image.png", threshold=0.3):
    print(found["label"], found["score"], found["box"])""",
        own="""sizes = [(image.height, image.width)]
(result,) = image_processor.post_process_object_detection(outputs, threshold=0.3, target_sizes=sizes)
for label, score, box in zip(result["labels"], result["scores"], result["boxes"]):
    print(model.config.id2label[int(label)], float(score), box.tolist())  # x1, y1, x2, y2
print(len(result["boxes"]), "objects")""",
    ),
    "HfViTForKeypointDetection": Usage(
        name="find_keypoints",
        stock="""# The whole image is one object; for others give boxes=[(x1, y1, x2, y2), ...]
for found in find_keypoints("image.png"):
    for label, place, score in zip(found["labels"], found["keypoints"], found["scores"]):
        print(label, place, score)""",
        own="""sizes = [(image.height, image.width)]
((result,),) = image_processor.post_process_keypoint_detection(outputs, target_sizes=sizes)
for label, place, score in zip(result["labels"], result["keypoints"], result["scores"]):
    print(model.config.id2label[int(label)], place.tolist(), float(score))""",
    ),
    "HfViTForMaskedImageModeling": Usage(
        name="describe",
        stock="""(features,) = describe("image.png")
print(len(features), "tokens of", len(features[0]), "features")""",
        own="""print(outputs.bool_masked_pos.float().mean(), "of the patches were masked")
print(outputs.reconstruction.shape)  # in the units of pixel_values""",
    ),
    "HfViTForZeroShotImageClassification": Usage(
        name="classify",
        stock="""names = ["dog", "cat", "car"]
print(classify("image.png", candidate_labels=names, hypothesis_template="a photo of a {}."))""",
        own="""print(outputs.logits_per_image.softmax(dim=1))  # the share of each text""",
        processor="processor",
        inputs='images=image, text=["a dog runs.", "two cats sleep."]',
    ),
}
