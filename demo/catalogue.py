"""The contents of the demo's source folder: real photographs, crops of them, and a caption for each.

A row of the table is a photograph from the scikit-image or scikit-learn wheel. Boxes are in pixels of that photograph,
height before width: (top, left, height, width). The captions were written by looking at each crop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MIN_SIDE_PX = 64


class Saved(StrEnum):
    """The file format of a photograph's images."""

    JPEG = "jpg"
    PNG = "png"


class Form(StrEnum):
    """The conversion of a crop, so that the folder has the kinds of files that users have."""

    AS_IS = "as is"
    TURNED = "turned"  # rotated by 90 degrees, with an EXIF orientation tag that sets it upright
    CUT_OUT = "cut out"  # RGBA, transparent outside its inscribed ellipse
    PALETTE = "palette"  # 64 colours
    GREY = "grey"


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of a photograph, saved as a separate image."""

    name: str
    box_px: tuple[int, int, int, int]  # top, left, height, width
    captions: tuple[str, ...]
    view: int = 0  # which of the photograph's files it is cut from
    form: Form = Form.AS_IS

    def __post_init__(self) -> None:
        """Reject crops that are too small to pack or have no caption."""
        if min(self.box_px[2:]) < MIN_SIDE_PX or min(self.box_px[:2]) < 0:
            raise ValueError(f"crop {self.name}: box {self.box_px} is not (top, left, height, width) in px, 64 or more")
        if not self.captions or not all(self.captions):
            raise ValueError(f"crop {self.name}: no caption")


@dataclass(frozen=True, slots=True, kw_only=True)
class Photograph:
    """A photograph, its folder in the demo, and its source files."""

    name: str
    files: tuple[str, ...]  # relative to site-packages; several are views of one scene
    wholes: tuple[tuple[str, ...], ...]  # captions of each full file
    crops: tuple[Crop, ...]
    saved: Saved = Saved.JPEG

    def __post_init__(self) -> None:
        """Reject a contradictory table row."""
        if len(self.files) != len(self.wholes):
            raise ValueError(f"{self.name}: {len(self.files)} files, but captions for {len(self.wholes)}")
        names = [crop.name for crop in self.crops]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two crops have one name")


def _crop(name: str, box_px: tuple[int, int, int, int], *captions: str, view: int = 0, form: Form = Form.AS_IS) -> Crop:
    return Crop(name, box_px, captions, view, form)


def _one(name: str, file: str, saved: Saved, captions: tuple[str, ...], *crops: Crop) -> Photograph:
    return Photograph(name=name, files=(file,), wholes=(captions,), saved=saved, crops=crops)


# fmt: off
PHOTOGRAPHS: tuple[Photograph, ...] = (
    _one(
        "astronaut", "skimage/data/astronaut.png", Saved.PNG,
        ("A smiling astronaut in an orange space suit, a flag and a model of a space shuttle behind her",
         "Portrait of a woman astronaut with her helmet beside her"),
        _crop("portrait", (0, 100, 300, 230), "A smiling woman above the dark neck ring of a space suit"),
        _crop("face", (30, 150, 150, 150), "The smiling face of a woman with short light brown hair"),
        _crop("neck_ring", (140, 100, 160, 220), "The black neck ring and collar of an orange space suit"),
        _crop("shuttle_model", (20, 350, 260, 130), "A model of a white space shuttle on its boosters and brown tank"),
        _crop("flag", (0, 0, 210, 105), "Hanging folds of the flag of the United States"),
        _crop("helmet", (340, 280, 172, 232), "A black and white space helmet with reflections in its visor"),
        _crop("mission_patch", (338, 120, 100, 100), "A round blue mission patch sewn on orange cloth"),
        _crop("name_tag", (320, 240, 100, 120), "A blue name tag with wings beside a white strap"),
        _crop("torso", (190, 20, 322, 330), "The orange chest of a space suit with patches and white straps"),
        _crop("half_length", (0, 20, 512, 340), "A woman in an orange space suit in front of a mottled grey wall"),
        _crop("sleeve", (280, 10, 230, 130), "The creased orange sleeve of a space suit"),
        _crop("head_and_backdrop", (0, 0, 250, 500), "A smiling woman between a flag and a model of a space shuttle"),
    ),
    _one(
        "coffee", "skimage/data/coffee.png", Saved.JPEG,
        ("A cup of espresso with a spoon on a red saucer on a wooden table",),
        _crop("cup", (0, 150, 320, 270), "A red and white cup half full of espresso", form=Form.TURNED),
        _crop("crema", (80, 190, 130, 190), "The golden brown crema of an espresso inside a white cup"),
        _crop("spoon", (190, 310, 150, 110), "A small steel spoon lying on a dark red saucer"),
        _crop("handle", (215, 180, 105, 105), "The shiny dark red handle of a cup"),
        _crop("saucer_left", (80, 75, 260, 150), "The left side of a glossy red saucer, the cup at its edge"),
        _crop("wood_grain", (20, 480, 240, 120), "Reddish brown wood grain of a table top"),
        _crop("wood_corner", (290, 0, 110, 110), "A brown wooden table top beside the shadow of a saucer"),
        _crop("rim", (10, 165, 110, 220), "The thick white rim of a coffee cup seen from above"),
        _crop("saucer_front", (280, 120, 120, 240), "The front edge of a red saucer on a wooden table"),
        _crop("table_edge", (0, 0, 200, 200), "The edge of a table, a red saucer at the right"),
        _crop("cup_and_saucer", (0, 80, 400, 400), "An espresso cup on a red saucer", "A cup of coffee"),
    ),
    _one(
        "cat", "skimage/data/chelsea.png", Saved.JPEG,
        ("A tabby cat with yellow-green eyes looking past the camera", "Close portrait of a cat"),
        _crop("face", (20, 30, 270, 330), "The face of a tabby cat with green eyes and a pink nose"),
        _crop("left_eye", (70, 115, 100, 110), "A yellow-green eye of a tabby cat"),
        _crop("right_eye", (90, 280, 96, 96), "The right eye of a cat with a narrow dark pupil"),
        _crop("both_eyes", (60, 110, 130, 260), "The two yellow-green eyes of a cat"),
        _crop("nose", (190, 190, 100, 130), "The pink nose and the mouth of a cat"),
        _crop("forehead", (0, 110, 96, 192), "The striped brown forehead of a tabby cat"),
        _crop("ear", (0, 290, 130, 110), "A cat's pink ear in front of a blurred grey background"),
        _crop("cheek", (120, 20, 150, 140), "The striped brown and white cheek of a tabby cat"),
        _crop("whiskers", (190, 0, 110, 220), "Long white whiskers on the cheek of a cat"),
        _crop("head_left", (0, 0, 300, 220), "The left half of a tabby cat's face, one green eye in view"),
        _crop("background", (60, 340, 200, 105), "A blurred white and grey background beside a cat"),
    ),
    _one(
        "china", "sklearn/datasets/images/china.jpg", Saved.JPEG,
        ("A Chinese tower with tiled roofs above trees, a lake with boats behind it",),
        _crop("tower", (15, 60, 400, 300), "A many-storeyed Chinese tower with orange and green tiled roofs"),
        _crop("roof", (20, 85, 120, 240), "The pointed tiled roof of a Chinese tower", form=Form.TURNED),
        _crop("upper_floors", (90, 80, 160, 255), "The upper floors of a tower with red columns and tiled eaves"),
        _crop("balcony", (170, 90, 100, 200), "Red columns and carved windows behind a balcony, tiled eaves above"),
        _crop("eaves", (235, 60, 96, 192), "Green and orange roof tiles over a red gallery"),
        _crop("lake", (190, 350, 120, 200), "Small boats on a hazy lake with an island and a bridge"),
        _crop("sky", (0, 330, 130, 250), "A pale blue sky without clouds"),
        _crop("conifer", (130, 540, 200, 100), "The top of a dark green tree against a hazy sky and a lake"),
        _crop("bushes", (290, 330, 130, 220), "Dense grey-green shrubs and trees"),
        _crop("treetops", (310, 0, 110, 190), "Green treetops in front of a red gallery"),
        _crop("view", (0, 320, 427, 320), "A hazy lake behind trees under a pale sky", form=Form.PALETTE),
        _crop("ground_floor", (280, 80, 120, 240), "A red gallery over a tiled roof, half hidden by trees"),
    ),
    _one(
        "flower", "sklearn/datasets/images/flower.jpg", Saved.JPEG,
        ("An orange dahlia in front of dark green leaves", "A dahlia in full bloom, a second one below it"),
        _crop("bloom", (75, 160, 290, 290), "The round head of an orange dahlia"),
        _crop("heart", (150, 240, 140, 140), "The dark orange centre of a dahlia with tightly rolled petals"),
        _crop("petals_left", (130, 165, 180, 120), "Overlapping pale orange petals at the left of a dahlia"),
        _crop("petals_right", (100, 340, 220, 110), "Pale orange petals of a dahlia against dark green"),
        _crop("second_bloom", (340, 280, 87, 170), "The top of a second orange dahlia below the first"),
        _crop("leaves_left", (60, 0, 200, 150), "Dark blue-green leaves out of focus"),
        _crop("leaves_right", (0, 450, 220, 190), "A blurred dark green background"),
        _crop("top_edge", (75, 190, 100, 200), "The upper petals of an orange dahlia"),
        _crop("bottom", (240, 180, 187, 240), "The lower petals of a dahlia above another flower"),
        _crop("wide", (60, 60, 320, 520), "One orange dahlia alone in the middle of dark foliage"),
        _crop("bud", (320, 480, 107, 160), "A small yellow bud out of focus in dark green leaves"),
        _crop("cut_out", (78, 164, 284, 286), "An orange dahlia cut out of its background", form=Form.CUT_OUT),
    ),
    _one(
        "rocket", "skimage/data/rocket.jpg", Saved.JPEG,
        ("A white rocket on its launch pad at dusk between lattice towers",),
        _crop("on_the_pad", (100, 240, 320, 160), "A tall white rocket standing on its launch pad at dusk"),
        _crop("nose", (115, 270, 96, 100), "The white nose of a rocket with a dark round emblem"),
        _crop("left_tower", (0, 0, 427, 215), "A steel lattice tower at dusk, bright lamps below it"),
        _crop("right_tower", (0, 540, 200, 100), "Steel lattice of a tower against a dark blue sky"),
        _crop("left_mast", (110, 140, 300, 150), "A thin mast with a red tip over bright star-shaped lamps"),
        _crop("right_mast", (110, 375, 300, 150), "A thin mast with a white tip in front of the evening sky"),
        _crop("lamps_left", (320, 60, 107, 160), "Four bright lamps shining like stars in the dusk"),
        _crop("pad", (330, 260, 97, 180), "The foot of a rocket on its pad between bright lamps"),
        _crop("sky", (0, 94, 114, 210), "An empty dark blue evening sky"),
        _crop("lamps_right", (340, 400, 87, 130), "Two star-shaped lamps under dark clouds"),
        _crop("between_masts", (60, 140, 367, 367), "A rocket between two lightning masts in the evening"),
        _crop("body", (170, 275, 190, 95), "The white body of a rocket beside its service tower"),
    ),
    Photograph(
        name="motorcycle",
        files=("skimage/data/motorcycle_left.png", "skimage/data/motorcycle_right.png"),
        wholes=(
            ("A red motorcycle in a garage with shelves behind it",),
            ("A red motorcycle on a concrete floor, shelves and a bench behind it",),
        ),
        crops=(
            _crop("bike", (90, 90, 370, 600), "A red Yamaha motorcycle seen from its right side"),
            _crop("front_wheel", (250, 500, 210, 200), "The front wheel and red mudguard of a motorcycle"),
            _crop("rear_wheel", (225, 110, 190, 190), "The black rear wheel of a motorcycle and a chrome exhaust"),
            _crop("engine", (230, 320, 160, 170), "The silver engine of a motorcycle"),
            _crop("headlight", (110, 480, 96, 120), "The round headlight of a motorcycle and an orange indicator"),
            _crop("tank", (160, 320, 110, 170), "The red fuel tank of a motorcycle"),
            _crop("seat", (150, 135, 110, 220), "The black seat of a red motorcycle"),
            _crop("cartons", (25, 500, 100, 200), "Cardboard boxes on a metal shelf"),
            _crop("bench", (95, 30, 220, 130), "A weathered wooden bench behind the tail of a motorcycle"),
            _crop("door", (0, 165, 140, 140), "A grey door with a white sheet on it behind a bench"),
            _crop("exhaust", (280, 165, 110, 170), "The long silver exhaust of a motorcycle beside its wheel"),
            _crop("tail_light", (185, 90, 96, 110), "The red tail light and an orange indicator of a motorcycle"),
            _crop("other_front_wheel", (250, 450, 210, 190), "A motorcycle wheel under a red mudguard", view=1),
            _crop("other_engine", (230, 270, 160, 180), "A silver motorcycle engine with a round cover", view=1),
            _crop("handlebars", (40, 270, 170, 270), "Handlebars and mirrors of a motorcycle by shelves", view=1),
            _crop("tools", (10, 320, 160, 170), "A yellow can and tools on a grey metal shelf", view=1),
            _crop("red_box", (160, 495, 130, 170), "A red plastic box and a carton under a shelf", view=1),
            _crop("rear", (190, 60, 220, 200), "A rear wheel in black and white", view=1, form=Form.GREY),
            _crop("floor", (410, 40, 90, 180), "A bare concrete floor", view=1),
        ),
        saved=Saved.PNG,
    ),
    _one(
        "camera", "skimage/data/camera.png", Saved.PNG,
        ("A man in a dark coat films with a camera on a tripod, black and white",),
        _crop("man", (50, 0, 462, 340), "A man in a long dark coat bent over a camera on a tripod"),
        _crop("head", (55, 150, 150, 130), "The head of a dark-haired man in profile, looking into a camera"),
        _crop("camcorder", (120, 240, 110, 120), "A small video camera on a tripod with a gloved hand on it"),
        _crop("tripod", (280, 215, 232, 200), "The legs of a tripod standing on grass"),
        _crop("tower", (100, 380, 110, 120), "A tall building and lower ones under a pale sky"),
        _crop("skyline", (110, 320, 130, 192), "Distant buildings, a tower and a dome at the edge of a lawn"),
        _crop("lawn", (260, 350, 140, 140), "Short grass of a lawn in black and white"),
        _crop("coat", (110, 0, 300, 200), "The back and sleeve of a dark coat"),
        _crop("sky", (0, 280, 100, 200), "A plain light grey sky"),
        _crop("hands", (165, 160, 150, 180), "Gloved hands at a tripod, black and white"),
        _crop("coat_hem", (330, 0, 182, 150), "The dark lower part of a coat against grass"),
    ),
    _one(
        "clock", "skimage/data/clock_motion.png", Saved.PNG,
        ("A round wall clock blurred by the motion of the camera",),
        _crop("dial", (80, 120, 150, 180), "The pale dial of a clock smeared sideways by motion"),
        _crop("left_half", (0, 0, 300, 200), "The left half of a motion-blurred clock on a grey wall"),
        _crop("right_half", (0, 200, 300, 200), "The right half of a motion-blurred clock on a grey wall"),
        _crop("wall", (0, 0, 90, 180), "A plain grey wall"),
        _crop("centre", (95, 150, 120, 120), "Bright horizontal streaks on a blurred white disc"),
        _crop("upper_part", (0, 60, 150, 300), "The upper half of a blurred bright disc below a grey wall"),
        _crop("lower_part", (150, 60, 150, 300), "The lower half of a blurred bright disc above a grey wall"),
    ),

    _one(
        "coins", "skimage/data/coins.png", Saved.PNG,
        ("Twenty-four ancient coins in four rows on a dark background",),
        _crop("standing_figure", (0, 290, 96, 94), "A large ancient coin with a standing figure on it"),
        _crop("large_head", (145, 300, 90, 84), "A large ancient coin with a head in profile"),
        _crop("lower_left", (220, 10, 83, 160), "Two old coins on a dark ground, a third cut off at the right"),
        _crop("upper_left", (20, 15, 140, 160), "Six small old coins in two rows"),
        _crop("middle", (85, 120, 130, 160), "Old coins with worn heads on a dark background"),
        _crop("bottom_row", (218, 80, 85, 170), "A large old coin between a small one and one that is cut off"),
        _crop("right_column", (40, 290, 188, 94), "Three coins of different sizes, one above the other"),
        _crop("left_columns", (20, 10, 210, 110), "Two columns of old coins on a dark ground"),
        _crop("face", (155, 178, 72, 72), "A coin with a round face seen from the front"),
        _crop("right_half", (0, 190, 303, 194), "Rows of ancient coins with figures and heads, black and white"),
    ),
    _one(
        "moon", "skimage/data/moon.png", Saved.PNG,
        ("The grey surface of the moon with craters", "Low-contrast photograph of the moon from close by"),
        _crop("crater", (40, 75, 96, 110), "A round crater on the moon, half in shadow"),
        _crop("bright_slope", (70, 280, 130, 110), "A bright slope and a small crater in a dark patch on the moon"),
        _crop("dark_patch", (370, 190, 130, 130), "A patch of black spots on the grey ground of the moon"),
        _crop("plain", (200, 330, 300, 180), "A smooth grey plain on the moon with faint specks"),
        _crop("upper_left", (0, 0, 250, 250), "A large crater and many small ones on the moon"),
        _crop("corner", (0, 380, 132, 132), "Grey lunar ground with tiny craters and a black spot in the corner"),
        _crop("pits", (420, 70, 90, 170), "Two small dark pits in the surface of the moon"),
        _crop("dark_trail", (200, 170, 300, 150), "A trail of dark spots leading down to a black patch on the moon"),
        _crop("lower_half", (256, 0, 256, 512), "A grey lunar plain with a black patch in its middle"),
        _crop("two_smudges", (220, 190, 100, 100), "Two dark smudges on grey lunar ground"),
    ),
    _one(
        "hubble_deep_field", "skimage/data/hubble_deep_field.jpg", Saved.JPEG,
        ("Hundreds of distant galaxies of all colours on a black sky",),
        _crop("spiral", (345, 65, 110, 115), "A pale blue spiral galaxy on a black sky"),
        _crop("yellow_galaxy", (410, 650, 150, 150), "A large glowing yellow galaxy among small ones"),
        _crop("star", (520, 690, 120, 130), "A bright star with crossed rays among galaxies"),
        _crop("orange_galaxy", (60, 230, 110, 120), "A round orange-red galaxy in the dark"),
        _crop("group", (100, 390, 110, 130), "A group of small galaxies close together"),
        _crop("pair", (270, 260, 110, 130), "White and orange galaxies side by side"),
        _crop("distorted", (390, 470, 96, 120), "A stretched orange galaxy on a black sky"),
        _crop("upper_left", (0, 0, 300, 600), "Many small galaxies and a purple star, red and blue, in deep space"),
        _crop("middle_strip", (100, 460, 500, 250), "Scattered faint galaxies on a black sky"),
        _crop("lower_left", (560, 0, 312, 400), "Small reddish and bluish galaxies in deep space"),
        _crop("centre", (220, 280, 420, 420), "Galaxies of many shapes in the middle of a deep-sky photograph"),
        _crop("right", (350, 560, 300, 440), "Two yellow galaxies and a star with rays in deep space"),
    ),
    _one(
        "retina", "skimage/data/retina.jpg", Saved.JPEG,
        ("The retina of a human eye, a red disc with branching blood vessels",),
        _crop("optic_disc", (530, 90, 280, 280), "The bright yellow optic disc of a retina with blood vessels over it"),
        _crop("macula", (540, 540, 320, 330), "The dark red spot in the middle of a retina"),
        _crop("upper_vessels", (120, 350, 300, 500), "Dark red vessels branching over the upper retina"),
        _crop("lower_vessels", (1100, 400, 250, 500), "A thick vessel along the lower part of a retina"),
        _crop("disc_and_vessels", (330, 120, 500, 260), "Blood vessels running up from the optic disc"),
        _crop("notch", (100, 1050, 260, 320), "The round edge of a retina image with a notch"),
        _crop("right_edge", (400, 1120, 500, 280), "The right edge of a red retina against black"),
        _crop("left_side", (450, 10, 512, 512), "The optic disc at the left side of a retina"),
        _crop("bottom_edge", (1140, 250, 260, 420), "Vessels at the lower edge of a retina, black below"),
        _crop("middle", (500, 350, 360, 700), "The reddish middle of a retina with a dark spot and fine vessels"),
    ),
    _one(
        "microaneurysms", "skimage/data/microaneurysms.png", Saved.PNG,
        ("Grey detail of a retina with three dark vessels and two small spots",),
        _crop("upper", (0, 0, 64, 102), "Two dark vessels and a small dark spot on grey"),
        _crop("lower", (38, 0, 64, 102), "Two dark vessels with a faint spot between them"),
        _crop("left", (0, 0, 102, 64), "Three dark lines across a grey ground, a dark spot at the top left"),
        _crop("right", (0, 38, 102, 64), "Dark lines on grey, the lowest one forked at the right"),
        _crop("spots", (0, 0, 80, 80), "Two small dark spots above and below a wavy vessel"),
    ),
    _one(
        "tissue", "skimage/data/ihc.png", Saved.PNG,
        ("Stained colon tissue under a microscope, brown glands and blue nuclei",),
        _crop("round_gland", (300, 240, 212, 160), "A brown stained gland cut across, with cells around its middle"),
        _crop("slit", (0, 250, 310, 210), "A brown gland with a white slit down its middle"),
        _crop("upper_gland", (0, 0, 260, 270), "A large brown gland of long narrow cells"),
        _crop("stroma", (260, 120, 160, 130), "Pale tissue with scattered blue nuclei between brown glands"),
        _crop("left_gland", (280, 0, 232, 170), "The brown lining of a gland beside an empty white space"),
        _crop("right_stroma", (280, 390, 222, 120), "Pale tissue with long blue nuclei"),
        _crop("wide", (150, 60, 200, 400), "Brown glands around a band of pale blue tissue"),
        _crop("meeting_glands", (130, 200, 150, 150), "The ends of two brown glands with pale tissue between them"),
        _crop("hollow", (400, 390, 110, 120), "A white hollow in pale tissue with blue nuclei"),
        _crop("cells", (60, 60, 128, 128), "Blue nuclei in brown stained cells, close together"),
    ),
    _one(
        "cell", "skimage/data/cell.png", Saved.PNG,
        ("A bright round cell floating in a dark grey liquid, microscope image",),
        _crop("close", (290, 340, 170, 170), "One round bright cell with a dark halo"),
        _crop("wide", (200, 200, 300, 350), "A bright round cell at the right of a grey field"),
        _crop("background", (0, 0, 300, 300), "A grainy dark grey background with faint bands"),
        _crop("smudge", (0, 200, 100, 200), "A dark smudge at the upper edge of a grey ground"),
        _crop("half_cell", (290, 430, 170, 110), "The right half of a bright round cell"),
        _crop("below", (400, 250, 200, 300), "The lower edge of a bright cell above a grey ground"),
        _crop("speck", (360, 110, 150, 150), "A small dark speck on a grey ground"),
    ),
    _one(
        "brick", "skimage/data/brick.png", Saved.PNG,
        ("Dark bricks with pale joints, seen at a slant", "A wall of grey bricks"),
        _crop("far_rows", (0, 0, 160, 320), "Narrow rows of dark bricks at the far end of a wall"),
        _crop("upper_middle", (0, 200, 256, 256), "Straight and slanted rows of dark bricks with pale mortar"),
        _crop("left_rows", (100, 0, 300, 150), "Rows of dark bricks leaning to the right"),
        _crop("centre", (128, 128, 256, 256), "Upright rows of dark bricks in the middle of a wall"),
        _crop("near_rows", (340, 100, 170, 320), "Wide dark bricks with light grey joints close by"),
        _crop("right_rows", (150, 360, 300, 150), "Rows of dark bricks leaning to the left"),
        _crop("joint", (160, 120, 110, 110), "Pale mortar joints meeting between dark bricks"),
        _crop("tall", (40, 200, 400, 200), "Long dark bricks standing upright in narrow rows"),
        _crop("few_bricks", (360, 220, 140, 140), "Two or three dark bricks with a pale joint between them"),
    ),
    _one(
        "grass", "skimage/data/grass.png", Saved.PNG,
        ("A grey image of grass with a few clover leaves",),
        _crop("broad_leaves", (30, 200, 128, 160), "Broad leaves among blades of grass"),
        _crop("clover", (100, 60, 140, 140), "Clover leaves and a long straw in the grass"),
        _crop("blades", (200, 200, 256, 256), "Thin blades of grass crossing each other"),
        _crop("light_leaf", (10, 400, 110, 112), "A pale leaf in short grass"),
        _crop("lower_left", (256, 0, 256, 256), "Dense grass and clover leaves with dark gaps"),
        _crop("strip", (380, 100, 130, 260), "A strip of tangled grass, black and white"),
        _crop("upright", (150, 380, 260, 130), "Tangled blades of grass in a tall image"),
        _crop("top", (0, 0, 200, 400), "Grass with some broad leaves seen from above"),
        _crop("close", (300, 240, 100, 140), "Light leaves and thin blades of grass from close by"),
    ),
    _one(
        "gravel", "skimage/data/gravel.png", Saved.PNG,
        ("Grey gravel seen from above",),
        _crop("many_stones", (0, 0, 256, 512), "Hundreds of small angular stones"),
        _crop("few_stones", (180, 30, 96, 96), "A few angular grey stones from close by"),
        _crop("white_stone", (90, 130, 128, 128), "A pale stone among darker gravel"),
        _crop("stalk", (60, 290, 130, 200), "A thin dry stalk lying on gravel"),
        _crop("lower_right", (300, 256, 212, 256), "Grey crushed stones with dark gaps between them"),
        _crop("column", (200, 300, 300, 150), "Angular stones in a tall image, black and white"),
        _crop("centre", (180, 180, 160, 160), "Loose grey stones of many shapes"),
        _crop("bottom_strip", (400, 40, 110, 220), "A strip of crushed stone"),
    ),
)
# fmt: on
